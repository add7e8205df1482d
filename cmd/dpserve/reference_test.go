package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const referencePath = "../../docs/cli.md"

const referenceHead = `# Command line

Written by ` + "`DPSERVE_UPDATE=1 go test ./cmd/dpserve -run TestReference`" + ` from the help texts; do
not edit.

Data goes to stdout, talk to stderr. An error is ` + "`dpserve: what is wrong`" + `, followed by ` +
	"`hint:`" + ` lines.
With ` + "`-o json`" + ` it is one line of JSON instead, the last one on stderr:
` + "`{\"apiVersion\", \"error\": {\"code\", \"message\", \"hint\", " +
	"\"details\", \"faults\", \"exit_code\"}}`" + `. A code is one of those of the
admin API, or ` + "`interrupted`" + `.
Listings take ` + "`-o table|wide|json|yaml|name`" + `; JSON has ` + "`apiVersion`" + `, and times are
RFC 3339 wherever no person reads. Progress is redrawn on a terminal and is one line per change elsewhere.
` + "`NO_COLOR`, `TERM=dumb` and `--no-color`" + ` are honoured. Destructive commands ask for the name, or
want ` + "`--yes`" + `. Ctrl-C, SIGTERM and a closed terminal (SIGHUP, unless nohup ignores it) mean the
same. ` + "`dpserve completion bash|zsh|fish|powershell`" + ` completes commands, flags, files, and
the names of applications, ranks and nodes, which it asks the cluster for.

| Exit code | Means |
|---|---|
| 0 | ok; also ` + "`up`, `serve` and `start`" + ` after a drain that a signal asked for, ` +
	`and a watch that Ctrl-C ended |
| 1 | error; also ` + "`deploy`" + ` when another deploy replaces its revision, ` +
	`its application is deleted or a rank ends during the rollout, and ` + "`doctor`" + ` when something fails |
| 2 | usage, or a file with faults |
| 3 | differs (only with ` + "`--exit-code`" + `) |
| 4 | authentication |
| 5 | cannot be rolled out |
| 8 | still pending at the time-out |
| 130 | interrupted: before ` + "`up` or `serve`" + ` served, by a second Ctrl-C, or in the monitor of ` +
	"`deploy`, `delete` or `drain`" + `, which go on without it |
`

// TestReference pins every help text: docs/cli.md consists of them.
func TestReference(t *testing.T) {
	want := reference(t)
	if os.Getenv("DPSERVE_UPDATE") != "" {
		require.NoError(t, os.WriteFile(referencePath, []byte(want), 0o644))
	}
	got, err := os.ReadFile(referencePath)
	require.NoError(t, err)
	assert.Equal(t, want, string(got),
		"help has changed; look at the difference, then run this test with DPSERVE_UPDATE=1")
}

func reference(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	b.WriteString(referenceHead)
	for _, name := range []string{
		"up", "serve", "chat", "start", "join", "validate", "convert", "plan", "deploy", "history", "get",
		"rollback", "status", "route", "route explain",
		"router", "router show", "router reset", "logs", "events", "delete", "ranks", "ranks add",
		"ranks call",
		"ranks remove", "nodes", "nodes remove", "nodes rotate-key",
		"drain", "undrain", "restart", "leave", "recover",
		"token", "token list", "token revoke",
		"doctor", "bench", "simulate", "version", "completion",
	} {
		cli := newCLI(t)
		require.Equal(t, 0, cli.run(append([]string{"help"}, strings.Fields(name)...)))
		b.WriteString("\n## " + name + "\n\n```text\n" + strings.TrimSpace(cli.stdout()) + "\n```\n")
	}
	cli := newCLI(t)
	for _, cmd := range newRoot(cli.env).Commands() {
		require.Contains(t, b.String(), "\n## "+cmd.Name()+"\n", "the reference lacks a command")
		for _, sub := range cmd.Commands() {
			require.Contains(t, b.String(), "\n## "+commandName(sub)+"\n", "the reference lacks a command")
		}
	}
	return b.String()
}
