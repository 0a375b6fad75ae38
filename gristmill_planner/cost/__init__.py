"""Cost model: seconds and bytes of a training step, from sizes of model, layout and hardware, and fitted constants."""
