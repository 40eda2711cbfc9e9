"""Publishing: a trainer's changed rows and weights as numbered publications on a bus, which servers follow.

In reading order:
    publication.py     a publication as values and as bytes
    message.py         the messages that carry it
    bus.py             the Bus protocol, and opening a bus by its address
    directory_bus.py, redis_bus.py, kafka_bus.py
    publisher.py       the trainer's side: when to cut, and what changed
    cut.py             what one rank publishes at a step
    delivery.py        the thread that sends cuts in order and retries
    rank_parts.py      the parts that the other ranks have put on the bus
    spool.py           publications on disk while the bus is unreachable
    history.py         the commits that are on a bus
    subscriber.py      the reader's side: complete publications in order, each once
    rollback.py        publishes an older state again
    apply.py           applies a publication to a model that answers no requests

hotrow.train and hotrow.serve import it. It imports hotrow.nn and what is below, never serve.

Threads: the trainer's thread cuts, one delivery thread sends. A bus or a subscriber belongs to one thread.
"""
