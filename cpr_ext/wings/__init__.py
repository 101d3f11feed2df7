"""What the engine works without: each folder is a wing, which no part of the engine imports."""
