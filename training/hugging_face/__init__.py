"""To and from Hugging Face transformers."""
