"""Where workers meet: the host, the connection to it, a round."""
