"""Bad numbers: NaN, infinities and spikes, found before the optimizer runs."""
