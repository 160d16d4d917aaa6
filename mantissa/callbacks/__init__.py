"""``mantissa.Watch`` as a callback of other libraries' trainers, one module for each library."""
