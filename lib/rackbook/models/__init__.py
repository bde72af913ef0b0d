"""Models: fitted and analytic curves through published or measured points."""
