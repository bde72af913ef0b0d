"""Replaying requests on data-parallel ranks: traces, mirror and lag, on simulated ranks and on real servers.

``traces`` draws requests and ``trace_files`` reads them. On simulated ranks, ``queues`` deals them, ``lockstep`` runs
them (``user_lockstep`` where users wait for answers) and ``imbalance`` measures a run by its step times;
``calibration`` repeats a lag replay and fits its costs; ``timelines``, ``lag_losses`` and ``routed_loads`` make tables.

On servers, ``prompts`` makes token ids, ``loads`` says what goes out when, ``targets`` where to, and ``client`` sends
it, by its event loop ``sender`` over ``http_connection``. ``measurement`` runs the experiment, with
``server_evidence`` beside it; ``throughput``, ``paired_losses``, ``step_probe`` and ``joint_steps`` read what came of
it, or of a simulation.
"""
