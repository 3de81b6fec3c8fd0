"""Room 4: rows between processes.

A link is a process group of our own. ``routes`` says what each process sends for a Round. The exchange sends and receives it, a transfer is
what is in flight, and the mixer puts all of it together: it applies the Round of the moment to rows that lie in several processes.
"""
