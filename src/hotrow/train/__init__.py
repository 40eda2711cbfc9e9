"""Training: batches through the pipeline, steps, metrics, checkpoints, reports.

Files, in reading order:
    trainer.py                 Trainer: options, and fit, evaluate, predict, save, load, stop
    fit.py                     one call of fit: the loop over batches and steps
    pipeline.py                the path of a training batch: read, route, prefetch, stage, fetch, compute
    lookahead.py               how many batches are in flight, and when that number shrinks
    stage_threads.py            runs each step on a thread of its own, with exact back-pressure
    train_step.py              one step: rows and dense weights change together
    step_metrics.py            counts the batches of complete steps
    metrics.py                 streaming AUC, log loss, calibration
    task_loss.py               the loss of several tasks, and the checks of their labels
    task_metrics.py            metrics of several tasks
    progressive_validation.py  metrics of predictions on examples not yet trained on, in windows
    distributed.py             a trainer's part in a job of ranks
    interrupt.py               Ctrl-C and SIGTERM end a run between two steps
    run_position.py            the progress of a run, for its checkpoint
    stage_times.py             busy and waiting time of each stage
    tier_traffic.py            traffic between tiers for a trace; HBM counters
    progress_view.py           the progress bar, or lines in a log
    report.py                  what fit and save return
    tensorboard.py             writes figures to TensorBoard
    checkpoint/                saving and loading

Imported by job, inspect, serve/repository, the demo and benchmarks; imports publish, nn, parallel, data and below.
Threads: the caller's is the training thread. Read, route, fetch and stage have a thread each while `fit` runs, and a
save may write on one more.
"""
