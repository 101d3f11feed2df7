"""What a ``TableWatch`` reports to the user."""

CHANGED_OUTSIDE = (
    "table '{name}' was changed outside its optimizer's step() ({what}). All of its rows count as "
    "changed until they are saved, and no snapshot without them is a full-recovery point. Change "
    "rows by the optimizer, or inside of writing_rows(), or call save('base') after such a change. "
    "This is reported once for each table"
)
STRANGER = (
    "a {kind} that the Checkpointer does not know updates table '{name}'; its state would not be "
    "saved. Give all optimizers to the Checkpointer; after replacing one, make a new Checkpointer"
)
NOT_LISTED = (
    "a CUDA graph changes table '{name}' by dense gradients, of which a graph cannot list the "
    "rows: they do not count as changed, and are saved once a comparison with what was saved finds "
    "them. Use sparse gradients, so that each replay counts its rows"
)
NOT_COUNTED = (
    "the rows that a step changed could not be counted: {error}. Later snapshots would lack them. "
    "Make a new Checkpointer"
)
