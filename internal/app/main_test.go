package app

import (
	"flag"
	"fmt"
	"os"
	"testing"
)

// TestMain makes property tests cheaper under -short.
func TestMain(m *testing.M) {
	flag.Parse()
	if testing.Short() {
		if err := flag.Set("rapid.checks", "20"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}
