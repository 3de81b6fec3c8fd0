"""Models and data sets to train. ``apps.data.digits()`` needs nothing but scikit-learn; others read the official files."""
