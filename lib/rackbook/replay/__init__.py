"""Replaying requests on data-parallel ranks: traces, mirror and lag, the lockstep simulator, and what imbalance costs.

``traces`` reads or draws requests, ``queues`` deals them to ranks, ``lockstep`` simulates the ranks, ``imbalance``
measures a run by its step times (a simulated one or any other). ``calibration`` repeats a lag replay and fits its
costs; ``timelines``, ``lag_losses`` and ``routed_loads`` make tables of simulated runs.
"""
