"""A world of random verbs, played on the engine and on a slow twin that is obviously right.

::

    models.py     tiny float64 models of several architectures, each with a twin: transformers itself
    twin.py       the twin's full prefill, and its pass over given rows
    mirror.py     what should be there: lists of tokens, names, positions
    rows.py       the one place that looks inside: the rows of a context
    checks.py     what a weave and an answer claim, against the twin
    memory.py     bytes of tensors really alive
    world.py      one engine and its mirror; a verb that is refused changes nothing
    chunks.py     verbs: what may happen to stored chunks
    contexts.py   verbs: what may happen to contexts
    answers.py    verbs: weaves and answers, each checked
    pruned.py     verbs: what an evict froze, repaired as a whole
    faults.py     verbs: something breaks in the middle of another one
    closing.py    verbs: close everything, open it again
    play.py       play a seed; make a failing list of verbs short, and print it
"""
