package cluster_test

import _ "github.com/anishathalye/porcupine"
