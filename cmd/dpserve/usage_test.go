package main

import (
	"cmp"
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/loadgen"
	"github.com/dpserve/dpserve/internal/problem"
)

func TestUsageErrors(t *testing.T) {
	cases := []struct {
		args string
		want string // on stderr; the exit code is 2
	}{
		{"statsu", "dpserve: unknown command \"statsu\"\nhint: did you mean `dpserve status`?\n"},
		{"frobnicate", "dpserve: unknown command \"frobnicate\"\nhint: `dpserve help` lists the commands\n"},
		{
			"help frobnicate",
			"dpserve: unknown command \"frobnicate\"\nhint: `dpserve help` lists the commands\n",
		},
		{"apply -f a.yaml", "dpserve: unknown command \"apply\"\nhint: `dpserve deploy FILE`\n"},
		{"route ps", "dpserve: unknown command \"ps\"\nhint: `dpserve help route` lists the commands\n"},
		{"status --json", "dpserve: unknown flag: --json\nhint: write -o json\n"},
		{
			"chat a b c",
			"dpserve: chat takes MODEL TEXT and nothing more, got \"c\"\nhint: see `dpserve help chat`\n",
		},
		{
			"chat --api-key-env NONE hi",
			"dpserve: --api-key-env NONE: the variable is empty\nhint: export NONE=KEY\n",
		},
		{"deploy", "dpserve: deploy wants FILE\nhint: see `dpserve help deploy`\n"},
		{
			"deploy a b",
			"dpserve: deploy takes FILE and nothing more, got \"b\"\nhint: see `dpserve help deploy`\n",
		},
		{"version x", "dpserve: version takes no argument, got \"x\"\nhint: see `dpserve help version`\n"},
		{"deploy --detatch f", "dpserve: unknown flag: --detatch\nhint: did you mean --detach?\n"},
		{"deploy --whatever f", "dpserve: unknown flag: --whatever\nhint: see `dpserve help deploy`\n"},
		{
			"deploy --timeout -1s f",
			"dpserve: --timeout -1s: must be positive\nhint: see `dpserve help deploy`\n",
		},
		{
			"delete demo --timeout 0s",
			"dpserve: --timeout 0s: must be positive\nhint: see `dpserve help delete`\n",
		},
		{
			"status -o xml",
			"dpserve: invalid argument \"xml\" for \"-o, --output\" flag: wanted " +
				"table|wide|json|yaml|name\nhint: see `dpserve help status`\n",
		},
		{
			"completion tcsh",
			"dpserve: shell \"tcsh\": wanted bash, zsh, fish, powershell\nhint: see `dpserve help " +
				"completion`\n",
		},
		{
			"logs demo/x",
			"dpserve: \"demo/x\": wanted APP, APP/GROUP or APP/GROUP/RANK\nhint: for example demo/0/3\n",
		},
		{
			"logs demo --tail -1",
			"dpserve: --tail and --since must not be negative\nhint: see `dpserve help logs`\n",
		},
		{
			"up --engine vllm",
			"dpserve: --engine \"vllm\": wanted sim\nhint: leave --engine out to run the file as written\n",
		},
		{
			"up a.yaml --attach http://127.0.0.1:1",
			"dpserve: --attach \"a.yaml\": wanted HOST:PORT or http://HOST:PORT\n" +
				"hint: see `dpserve help up`\n",
		},
		{
			"start --timers probe=soon",
			"dpserve: --timers probe=soon: wanted a duration\nhint: for example --timers probe=500ms\n",
		},
		{
			"start --log-format xml",
			"dpserve: --log-format \"xml\": wanted text, json\n" +
				"hint: leave --log-format out for its default\n",
		},
		{
			"start --log-level wrn",
			"dpserve: --log-level \"wrn\": wanted debug, info, warn, error\nhint: did you mean warn?\n",
		},
		{
			"start --addr :1",
			"dpserve: start runs a node of its own, and --addr names one that runs\n" +
				"hint: see `dpserve help start` for the addresses at which it listens\n",
		},
		{
			"validate a.yaml --print -o json",
			`{"apiVersion":"dpserve/v1","error":{"code":"invalid_argument","message":"--print and --output ` +
				"exclude each other\",\"hint\":\"see `dpserve help validate`\",\"exit_code\":2}}\n",
		},
		{
			"validate /nowhere/app.yaml",
			"dpserve: cannot read /nowhere/app.yaml: no such file or directory\nhint: `dpserve up` without " +
				"a file runs a ready-made example\n",
		},
	}
	for _, c := range cases {
		t.Run(c.args, func(t *testing.T) {
			cli := newCLI(t)
			assert.Equal(t, 2, cli.run(strings.Fields(c.args)))
			assert.Equal(t, c.want, cli.stderr())
			assert.Empty(t, cli.stdout())
		})
	}
}

// Hints for words of other tools name commands that there are, and no such word is a command here.
func TestOtherWordsNameCommands(t *testing.T) {
	root := newRoot(newCLI(t).env)
	named := regexp.MustCompile("`dpserve ([a-z]+)( [a-z]+)?")
	for _, words := range []map[string]string{otherCommands, otherFlags, otherResources} {
		for word, hint := range words {
			for _, m := range named.FindAllStringSubmatch(hint, -1) {
				if m[1] == "help" {
					continue
				}
				cmd, _, err := root.Find([]string{m[1]})
				require.NoError(t, err, word)
				require.NotEqual(t, root, cmd, hint)
				if cmd.HasSubCommands() && m[2] != "" {
					assert.Contains(t, commandNames(cmd), strings.TrimSpace(m[2]), hint)
				}
			}
		}
	}
	for word := range otherCommands {
		assert.NotContains(t, commandNames(root), word)
	}
	cli := newCLI(t)
	cli.cluster.down = &client.Error{Code: client.CodeNotFound, Message: "there is no application"}
	assert.Equal(t, 1, cli.run([]string{"get", "pods"}))
	assert.Equal(t, "dpserve: there is no application\nhint: "+hintStatus+"\n", cli.stderr())
}

// Every command stands under a subject in the help.
func TestCommandsHaveSubjects(t *testing.T) {
	for _, cmd := range newRoot(newCLI(t).env).Commands() {
		assert.True(t, cmd.GroupID != "" || !cmd.IsAvailableCommand() || cmd.Name() == "help", cmd.Name())
	}
}

func TestPublicBindIsRefused(t *testing.T) {
	for _, flag := range []string{"--http-bind", "--admin-bind", "--metrics-bind"} {
		for _, addr := range []string{"0.0.0.0:0", ":0", "[::]:0", "10.0.0.1:0"} {
			cli := newCLI(t)
			assert.Equal(t, 2, cli.run([]string{"start", flag, addr}))
			assert.Contains(t, cli.stderr(), flag+" "+addr+" is reachable from outside")
			assert.Contains(t, cli.stderr(), "--insecure-public")
		}
	}
}

// up has no flag for a public bind, so its hint names the command that has one.
func TestUpBindsLoopbackOnly(t *testing.T) {
	cli := newCLI(t)
	assert.Equal(t, 2, cli.run([]string{"up", "--metrics-bind", ":9100"}))
	assert.Contains(t, cli.stderr(), "--metrics-bind :9100 is reachable from outside\n")
	assert.Contains(t, cli.stderr(), "hint: `dpserve up` binds loopback only; `dpserve start` can bind more")
}

func TestAdminHostIsAName(t *testing.T) {
	for _, name := range []string{"", "http://head", "head:8265", "*.example.com", "a b"} {
		cli := newCLI(t)
		assert.Equal(t, 2, cli.run([]string{"start", "--admin-host", name}), name)
		assert.Contains(t, cli.stderr(), "--admin-host")
	}
}

func TestExitCodes(t *testing.T) {
	cases := map[error]int{
		nil:               0,
		errors.New("any"): 1,
		errInterrupted:    130,
		&silentError{3}:   3,
		problem.New(problem.InvalidArgument, "x"):   2,
		problem.New(problem.Unauthenticated, "x"):   4,
		problem.New(problem.PermissionDenied, "x"):  4,
		problem.New(problem.Unplaceable, "x"):       5,
		problem.New(problem.Timeout, "x"):           8,
		problem.New(problem.NotFound, "x"):          1,
		problem.New(problem.Conflict, "x"):          1,
		&client.Error{Code: client.CodeTooLarge}:    2,
		&client.Error{Code: client.CodeUnplaceable}: 5,
		&client.Error{Code: client.CodeConflict}:    1,
	}
	for err, want := range cases {
		assert.Equal(t, want, exitCode(err), "%v", err)
	}
}

func TestReport(t *testing.T) {
	var b strings.Builder
	report(&b, problem.New(problem.Unplaceable, "does not fit.").WithDetails("need 4", "free 2").
		WithHint("first\nsecond"))
	assert.Equal(t, "dpserve: does not fit\n  need 4\n  free 2\nhint: first\nhint: second\n", b.String())

	b.Reset()
	report(&b, &client.Error{Code: client.CodeInvalidArgument, Message: "1 fault", Faults: []client.Fault{
		{File: "app.yaml", Line: 3, Col: 5, Message: "unknown key", Hint: "leave it out"},
	}})
	assert.Equal(t, "dpserve: 1 fault\napp.yaml:3:5: unknown key; hint: leave it out\n", b.String())

	b.Reset()
	report(&b, &silentError{1})
	reportJSON(&b, &silentError{1})
	assert.Empty(t, b.String())
}

// A help text says what the command does, then how it is called, then examples and flags.
func TestHelpOrder(t *testing.T) {
	root := newRoot(newCLI(t).env)
	for cmd := range allCommands(root) {
		cli := newCLI(t)
		path := strings.Fields(commandName(cmd))
		require.Equal(t, 0, cli.run(append([]string{"help"}, path...)), path)
		text := "\n" + cli.stdout()
		last := -1
		for _, heading := range []string{
			cmp.Or(cmd.Long, cmd.Short), "\nUsage:\n  dpserve " + commandName(cmd), "\nExamples:\n  ",
			"\nFlags:\n", "\nEverywhere:\n",
		} {
			at := strings.Index(text, heading)
			require.Greater(t, at, last, "%s: %.40q", path, heading)
			last = at
		}
		assert.True(t, strings.HasPrefix(text, "\n"+cmp.Or(cmd.Long, cmd.Short)), path)
		assert.NotEmpty(t, cmd.Short, path)
		assert.Empty(t, cli.stderr())

		flag := newCLI(t)
		require.Equal(t, 0, flag.run(append(path, "--help")))
		assert.Equal(t, cli.stdout(), flag.stdout(), "help %s and %s --help differ", path, path)
	}
}

// The name of a flag's value is one word in the help, and no default is empty.
func TestFlagUsages(t *testing.T) {
	for cmd := range allCommands(newRoot(newCLI(t).env)) {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			name, _ := pflag.UnquoteUsage(f)
			assert.NotContains(t, name, " ", "%s --%s", commandName(cmd), f.Name)
			assert.Equal(t, strings.Count(f.Usage, "`")/2*2, strings.Count(f.Usage, "`"), f.Usage)
			assert.LessOrEqual(t, strings.Count(f.Usage, "`"), 2, "%s --%s", commandName(cmd), f.Name)
		})
		assert.NotContains(t, cmd.Flags().FlagUsages(), "(default )", commandName(cmd))
	}
}

// CC7: in a pipe, each command that reads prints one JSON document on stdout, without escape sequences, and
// what it warns of on stderr. Nothing is coloured that no terminal reads.
func TestDocumentsInAPipe(t *testing.T) {
	warned := file(t, "applications: [{name: demo, model: {id: demo}, engine: {kind: sim}, "+
		"routing: {policy: cohorts}}]\n")
	for _, line := range []string{
		"validate " + warned, "plan " + warned, "deploy --detach " + warned, "deploy --dry-run " + warned,
		"status", "status demo", "nodes", "router show demo", "token list", "version",
	} {
		for _, output := range []string{"json", "yaml", "name", "table"} {
			c := completingCLI(t)
			c.cluster.nodes.plan.Fits = true
			code := c.run(append(strings.Fields(line), "-o", output))
			if output == "json" {
				decode[map[string]any](t, c.stdout())
			}
			assert.Zero(t, code, "%s: %s", line, c.stderr())
			assert.NotContains(t, c.stdout()+c.stderr(), "\x1b", line)
			if strings.Contains(line, warned) && !strings.HasPrefix(line, "validate") {
				assert.Contains(t, c.stderr(), "warning: "+warned, line)
			}
			assert.NotContains(t, c.stdout(), "dpserve: ", line)
		}
	}
}

// Documents begin with their version. They show the characters of HTML as they are, lines escape them.
func TestDocumentsKeepTheirText(t *testing.T) {
	var b strings.Builder
	doc := versioned{map[string]string{"text": "<a> & \u2028"}}
	require.NoError(t, writeDocument(&b, formatJSON, doc, nil))
	require.NoError(t, writeJSONLine(&b, doc))
	want := []string{
		"{", `  "apiVersion": "dpserve/v1",`, `  "text": "<a> & \u2028"`, "}",
		`{"apiVersion":"dpserve/v1","text":"\u003ca\u003e \u0026 \u2028"}`, "",
	}
	assert.Equal(t, want, strings.Split(b.String(), "\n"))
}

func TestJoinLinesMakesOneCell(t *testing.T) {
	assert.Equal(t, "a/0/0 has failed: x y; a/0/1 has failed: z",
		joinLines("a/0/0 has failed:  x\ty\na/0/1 has failed: z\n"))
}

func TestBenchOverheadWithErrorsFails(t *testing.T) {
	clean := loadgen.OverheadRun{Errors: map[string]int{}}
	require.NoError(t, failedRuns(&loadgen.Overhead{Runs: []loadgen.OverheadRun{clean}}))
	err := failedRuns(
		&loadgen.Overhead{Runs: []loadgen.OverheadRun{clean, {Errors: map[string]int{"direct connect": 1}}}})
	require.EqualError(t, err, "requests failed in 1 of 2 runs")
	assert.Equal(t, 1, exitCode(err))
}

// RP13, RP54: A node accepts no body limit that other nodes refuse.
func TestMaxBodyIsBounded(t *testing.T) {
	for _, command := range []string{"start", "up"} {
		for _, mib := range []string{"0", "1025", "-1"} {
			cli := newCLI(t)
			assert.Equal(t, 2, cli.run([]string{command, "--max-body", mib}))
			assert.Contains(t, cli.stderr(), "--max-body "+mib+": want 1 to 1024 MiB")
		}
	}
}
