"""Room 6: who takes part. Workers die, hang, come back and leave; the others go on.

``roster``, ``member`` and ``collectives`` are the rules, without threads and sockets. ``membership`` runs them, and ``survivors`` has what
deaths and newcomers need beyond it. ``changes`` says what a change of members means for a model, and ``launch`` starts the workers.
"""
