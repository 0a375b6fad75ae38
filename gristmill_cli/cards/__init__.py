"""Cards of data and of models, and what pushes both to the Hugging Face Hub."""
