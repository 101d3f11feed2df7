"""A cluster's failures played on one machine, with an emulated clock, while really training."""
