"""Proofs that a training loop resumes bit for bit: it is run in small, killed and compared."""
