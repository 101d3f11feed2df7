"""A reader of files, whose position is saved."""


class Reader:
    """Reads the files of one rank."""

    def __init__(self, rank):
        self.rank, self.offset = rank, 0

    def state_dict(self):
        return {"rank": self.rank, "offset": self.offset}

    def load_state_dict(self, state):
        self.rank, self.offset = state["rank"], state["offset"]
