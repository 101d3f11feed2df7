"""One package per framework whose models need more than hooks on ``nn.EmbeddingBag``."""
