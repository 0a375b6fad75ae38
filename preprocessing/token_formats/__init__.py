"""Token files that other programs wrote: nanoGPT and llm.c, Megatron, Hugging Face datasets, Mosaic's MDS."""
