package main

import (
	"cmp"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the linker (-X main.version=v0.1.0). A plain `go build` or `go install` uses the build
// info of the binary.
var version string

// buildInfo is the output of `dpserve version`.
type buildInfo struct {
	APIVersion string `json:"apiVersion"`
	Version    string `json:"version"`
	Commit     string `json:"commit,omitempty"`
	Date       string `json:"date,omitempty"` // of the commit, RFC 3339
	Modified   bool   `json:"modified"`       // built from a changed checkout
	Go         string `json:"go"`
	Platform   string `json:"platform"` // OS/ARCH
}

func readBuildInfo() buildInfo {
	b := buildInfo{
		APIVersion: apiVersion, Version: version, Go: runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	info, ok := debug.ReadBuildInfo()
	if ok {
		b.Version = cmp.Or(b.Version, info.Main.Version)
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				b.Commit = s.Value
			case "vcs.time":
				b.Date = s.Value
			case "vcs.modified":
				b.Modified = s.Value == "true"
			}
		}
	}
	b.Version = cmp.Or(b.Version, "(devel)")
	return b
}

func newVersion(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "version [flags]",
		Short:   "build info",
		Example: "  dpserve version -o json",
		Args:    requireArgs(0),
	}
	output := addOutput(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		b := readBuildInfo()
		l := &listing{document: b, names: []string{b.Version}, table: func(wide bool) []*table {
			t := &table{head: []string{"VERSION", "GO", "PLATFORM"}}
			row := cells(b.Version, b.Go, b.Platform)
			if wide {
				t.head = append(t.head, "COMMIT", "DATE")
				row = append(row, cells(b.Commit, b.Date)...)
			}
			t.add(row...)
			return []*table{t}
		}}
		return l.write(e.io, *output)
	}
	return cmd
}
