"""Scratch: the folder of a process in which tasks work on copies, and how much of the disk each of them may take."""
