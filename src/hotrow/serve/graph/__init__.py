"""Graphs: a tower as exported by torch.export, on disk and in memory.

In reading order:
    tower.py           exports a tower with free sizes and weights as inputs; OriginalTower runs the result
    graph_archive.py   the graph on disk, checked so that reading it cannot run code
    tower_graph.py     the graph as one flat function of weights and inputs, for the compiler
    graph_rewrite.py   the same tower with fewer and faster calls

serve/repository, compile and execution import it. It imports nothing of serve.

Threads: any. Graphs never change after their construction; weights are replaced as a whole.
"""
