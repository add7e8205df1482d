//go:build !race

package cluster_test

const raced = false
