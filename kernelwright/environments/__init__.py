"""What happens to a reply. Each module holds one environment: `refine` (reply -> code -> evaluation -> feedback)."""
