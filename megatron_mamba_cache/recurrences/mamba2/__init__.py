"""The state-space scan and the one-token update, with states read from and written to slots."""
