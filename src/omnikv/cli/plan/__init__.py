"""`omnikv plan`: who sends what to whom between two layouts, and whether it is proven to be everything."""
