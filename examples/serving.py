"""Keep the tables of a serving process up to date while another process trains.

    cpr train --steps 2000 --every-steps 50 --store runs/a     # trains
    cpr publish runs/a --to runs/rows --every 2                # writes the rows that changed
    python examples/serving.py runs/rows                       # serves

The argument may also be an address, such as s3://bucket/rows. It prints how old each state was when
it became visible, and how many bytes that took, beside the bytes of all tables.
"""

import argparse
import time

from torch import nn

from cpr_ext.wings.publishing import KeyedRows, Subscriber, read_publication


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("publication")
    parser.add_argument("--states", type=int, default=0, help="end after so many; 0: never")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between polls")
    options = parser.parse_args(arguments)

    while (publication := read_publication(options.publication)) is None:
        time.sleep(options.pause)
    tables = {
        name: (KeyedRows if table.is_keyed else nn.EmbeddingBag)(
            table.num_embeddings, table.embedding_dim, dtype=table.dtype
        )
        for name, table in publication.tables.items()
    }
    whole = sum(bag.weight.numel() * bag.weight.element_size() for bag in tables.values())
    subscriber = Subscriber(options.publication, tables)
    seen = 0
    while not options.states or seen < options.states:
        started = time.perf_counter()
        applied = subscriber.poll()
        if applied is None:
            time.sleep(options.pause)
            continue
        seen += 1
        print(
            f"step {applied.step}: {applied.rows} rows, {applied.file_bytes} bytes "
            f"({applied.file_bytes / whole:.1%} of all tables), applied in "
            f"{time.perf_counter() - started:.3f} s, visible {applied.saved_age_seconds:.1f} s "
            f"after training saved it, {applied.age_seconds:.1f} s after it was published"
        )
        for name, keys in applied.gone.items():
            print(f"{name}: {len(tables[name])} ids have a row, {len(keys)} have none any more")
    return tables


if __name__ == "__main__":
    main()
