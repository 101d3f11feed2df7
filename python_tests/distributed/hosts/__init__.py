"""Jobs on several hosts, hurt at random, next to a model that knows every sample's fate."""
