"""Replaying requests on data-parallel ranks: traces, mirror and lag, the lockstep simulator, and what imbalance costs.

``traces`` reads or draws requests, ``queues`` deals them to ranks, ``lockstep`` simulates the ranks, ``imbalance``
measures a run by its step times (a simulated one or any other), ``order_statistics`` says what the slowest of several
ranks costs under a law of step times.
"""
