"""What a back end must do, as pytest modules: `tqppo backends check KIND NAME` runs them on any back end."""
