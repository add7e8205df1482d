package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/server"
)

// version is set by the linker (-X main.version=v0.1.0). A plain `go build` or `go install` uses the build
// info of the binary.
var version string

// buildInfo is the output of `dpserve version`.
type buildInfo struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Date     string `json:"date,omitempty"` // of the commit, RFC 3339
	Modified bool   `json:"modified"`       // built from a changed checkout
	Go       string `json:"go"`
	Platform string `json:"platform"` // OS/ARCH

	Check *server.Reads `json:"check,omitempty"` // with --check
}

func readBuildInfo() buildInfo {
	b := buildInfo{
		Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	if info, ok := debug.ReadBuildInfo(); ok {
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
	check := ""
	cmd := &cobra.Command{
		Use:   "version [flags]",
		Short: "build info",
		Long: `version prints what this binary is. With --check it also says what it understands: the
versions of the protocol of shims, the level of the state, and whether it reads a data folder, which it
neither changes nor locks. Exit code 1: it does not read it. "dpserve restart" asks the new binary in this
way before it lets go of the old one. The level of a log is known only to the node that runs on it.`,
		Example: `  dpserve version -o json
  dpserve version --check /var/lib/dpserve`,
		Args: requireArgs(0),
	}
	cmd.Flags().StringVar(&check, "check", "", "`DATA-DIR` that this binary is to read")
	output := addOutput(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		b := readBuildInfo()
		if check == "" {
			return listVersion(&b).write(e.io, *output)
		}
		reads := server.CheckDataDir(check)
		b.Check = &reads
		if err := listVersion(&b).write(e.io, *output); err != nil || reads.OK {
			return err
		}
		if output.isTable() {
			printMessage(e.io.Err, "%s", reads.Reason)
		}
		return &silentError{code: 1}
	}
	return cmd
}

// listVersion lists the build, and with --check what it understands.
func listVersion(b *buildInfo) *listing {
	return &listing{document: b, names: []string{b.Version}, table: func(wide bool) []*table {
		t := &table{head: []string{"VERSION", "GO", "PLATFORM"}}
		row := cells(b.Version, b.Go, b.Platform)
		if wide {
			t.head = append(t.head, "COMMIT", "DATE")
			row = append(row, cells(b.Commit, b.Date)...)
		}
		if c := b.Check; c != nil {
			t.head = append(t.head, "SHIM", "LEVEL", "READS")
			row = append(row, cells(fmt.Sprintf("%d-%d", c.ShimOldest, c.ShimNewest),
				strconv.Itoa(c.StateLevel), strconv.FormatBool(c.OK))...)
		}
		t.add(row...)
		return []*table{t}
	}}
}
