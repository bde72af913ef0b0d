"""What the experiments measure: settings and a cluster in, a recorded run out."""
