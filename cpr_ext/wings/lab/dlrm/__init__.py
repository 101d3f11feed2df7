"""The reference model (DLRM) and the data it is trained on."""
