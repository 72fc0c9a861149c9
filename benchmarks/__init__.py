"""Programs that measure. Each prints JSON; figures are ratios within one run."""
