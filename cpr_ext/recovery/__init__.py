"""From a store back into a model, and the report of what that restored."""
