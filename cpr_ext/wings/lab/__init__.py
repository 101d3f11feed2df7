"""The wing of experiments: a reference model, a cluster's failures replayed, and their pages."""
