"""`dcar speed`: what a decoding step costs against what the machine allows."""
