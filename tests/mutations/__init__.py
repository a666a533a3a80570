"""Deliberate faults in kernels and host code, and the tests that must catch each.

    python -m tests.mutations                 all of them, in copies of the tree; writes notebooks/results/mutations.json
    python -m tests.mutations --only ID,...   some of them

table.py is the list. A fault whose text is not in its file exactly once is an error, here and in test_mutations.py.
"""
