"""Measures engines and ONNX Runtime without HTTP. Of the other folders of loadtest, only `evaluate/` imports engines, and none imports
models, exporters or ONNX Runtime.
"""
