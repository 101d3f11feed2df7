"""The wing of tools: what is done with a store outside training, or with a training script."""
