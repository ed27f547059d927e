"""`attnserve load`: loads a running service with Locust, and computes figures from the samples (the measurements of single requests).

No file here imports locust, because the import patches the standard library of its process.
"""
