"""What a ``TableWatch`` reports to the user."""

CHANGED_OUTSIDE = (
    "table '{name}' was changed outside its optimizer's step() ({what}). All of its rows count as "
    "changed until they are saved; only a base snapshot makes a full-recovery point again. Change "
    "rows by the optimizer, or inside of writing_rows(), or call save('base') after such a change. "
    "This is reported once for each table"
)
UNSEEN = (
    "table '{name}' may have changed unseen: {what}. All of its rows count as changed until they "
    "are saved. Capture CUDA graphs after the Checkpointer is made, with sparse gradients, so that "
    "each replay counts its rows; call step() only after an optimizer's step(). This is reported "
    "once for each table"
)
STRANGER = (
    "a {kind} that the Checkpointer does not know updates table '{name}'; its state would not be "
    "saved. Give all optimizers to the Checkpointer; after replacing one, make a new Checkpointer"
)
NOT_COUNTED = (
    "the rows that a step changed could not be counted: {error}. Later snapshots would lack them. "
    "Make a new Checkpointer"
)
