"""Graphs: a tower as exported by torch.export, on disk and in memory.

In reading order:
    tower_inputs.py    the tensors that a tower or one of its parts reads, and which of their sizes are free
    tower.py           exports a tower with free sizes and weights as inputs; OriginalTower runs the result
    two_parts.py       exports a tower with a user part as two graphs, and compares both with the tower
    export_errors.py   why torch.export refused a tower, with the line of its source and the cure
    graph_archive.py   the graph on disk, checked so that reading it cannot run code
    graph_arguments.py the arguments and outputs of a graph, by name
    tower_graph.py     the graph as one flat function of weights and inputs, for the compiler
    graph_rewrite.py   the same tower with fewer and faster calls

serve/repository, compile and execution import it. It imports nothing of serve.

Threads: any. Graphs never change after their construction; weights are replaced as a whole.
"""
