package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/test/parallel"
)

// printServe returns what `dpserve serve WORDS --print` prints.
func printServe(t *testing.T, words ...string) string {
	t.Helper()
	c := newCLI(t)
	require.Equal(t, 0, c.run(append([]string{"serve", "--print"}, words...)), "%q\n%s", words, c.stderr())
	return c.stdout()
}

const servePath = "testdata/serve.txt"

// EN1: TestServeTranscript pins what serve makes of command lines: blocks of testdata/serve.txt, which
// DPSERVE_UPDATE=1 writes anew. `print` adds --print.
func TestServeTranscript(t *testing.T) {
	checkBlocks(t, servePath, func(words []string) string { return transcribeServe(t, words) })
}

// checkBlocks compares the blocks of a file, a command line and what comes of it, with what transcribe says.
func checkBlocks(t *testing.T, path string, transcribe func(words []string) string) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	blocks := strings.Split(strings.TrimSpace(string(text)), "\n\n")
	for i, block := range blocks {
		typed, want, isCommand := strings.Cut(block+"\n", "----\n")
		if !isCommand {
			continue // a comment
		}
		got := transcribe(strings.Fields(typed))
		if blocks[i] = strings.TrimSpace(typed + "----\n" + got); os.Getenv("DPSERVE_UPDATE") == "" {
			assert.Equal(t, strings.TrimSpace(want), strings.TrimSpace(got), typed)
		}
	}
	if os.Getenv("DPSERVE_UPDATE") != "" {
		require.NoError(t, os.WriteFile(path, []byte(strings.Join(blocks, "\n\n")+"\n"), 0o644))
	}
}

// transcribeServe returns what serve says, and its exit code if that is not 0.
func transcribeServe(t *testing.T, words []string) string {
	t.Helper()
	c := newCLI(t)
	if words[0] == "print" {
		words = append([]string{"serve", "--print"}, words[1:]...)
	}
	code := c.run(words)
	assert.Empty(t, c.node.config.DataDir, "nothing was started: %q", words)
	if code == 0 {
		return c.stdout() + c.stderr()
	}
	assert.Empty(t, c.stdout(), words)
	return c.stderr() + fmt.Sprintf("exit %d\n", code)
}

// A folder becomes absolute, so that the file means the same in another folder.
func TestServeLocalModel(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	require.NoError(t, os.MkdirAll("models/Llama 3", 0o700))
	require.NoError(t, os.MkdirAll("models/llama", 0o700))
	here, err := filepath.Abs(".")
	require.NoError(t, err)
	assert.Contains(t, printServe(t, "models/llama/"), "name: llama\n    model:\n      id: models/llama/\n"+
		"      source: "+here+"/models/llama\n")

	c := newCLI(t)
	assert.Equal(t, 2, c.run([]string{"serve", "./models/none"}))
	assert.Equal(t, "dpserve: cannot read the model ./models/none: no such file or directory\n"+
		"hint: MODEL is a folder with the model's files, or a Hugging Face id such as Qwen/Qwen3-8B\n",
		c.stderr())
	assert.Contains(t, printServe(t, "./models/none", "--engine", "sim"), "id: \"./models/none\"\n")
}

// Without a device and without the engine's program nothing starts.
func TestServeNeedsDevicesAndProgram(t *testing.T) {
	none := []*app.Application{{Name: "a", Engine: app.Engine{Kind: app.KindVLLM}}}
	none[0].Resources.GPUs = 1
	f := &serveFlags{up: newUpFlags()}
	err := f.checkDevices(none)
	require.EqualError(t, err, "no device is known here, and vllm needs 1 device per rank")
	assert.Equal(t, 5, exitCode(err))
	f.up.node.config.GPUs = "0-3"
	require.NoError(t, f.checkDevices(none))
	programs := t.TempDir()
	t.Setenv("PATH", programs)
	f.up.node.config.GPUs = "auto"
	require.Error(t, f.checkDevices(none))
	require.NoError(t, parallel.WriteProgram(filepath.Join(programs, "rocm-smi"), nil))
	require.NoError(t, f.checkDevices(none))
	err = checkPrograms(context.Background(), none)
	require.EqualError(t, err, `a: engine vllm is not installed: no program "vllm" in PATH`)
	assert.Equal(t, 5, exitCode(err))
	assert.Contains(t, describeError(err).Hint, "--command of serve, engine.command of a file")
	none[0].Engine.Command = []string{"/nowhere/vllm", "serve"}
	require.EqualError(t, checkPrograms(context.Background(), none),
		"a: engine vllm is not installed: cannot run /nowhere/vllm: no such file or directory")
	none[0].Engine.Kind = app.KindSim
	require.NoError(t, checkPrograms(context.Background(), none))
}

// A command that runs a Python module needs the module. If Python cannot tell, the engine's start will.
func TestServeNeedsThePythonModule(t *testing.T) {
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	a := []*app.Application{{Name: "a", Engine: app.Engine{Kind: app.KindSGLang}}}
	for code, want := range map[string]string{
		"0": "", "1": "",
		"3": "a: engine sglang is not installed: " + bin + `/python3 has no module "sglang"`,
	} {
		script := "#!/bin/sh\n[ \"$3\" = sglang ] && exit " + code + "\nexit 3\n"
		require.NoError(t, parallel.WriteProgram(filepath.Join(bin, "python3"), []byte(script)))
		if err := checkPrograms(t.Context(), a); want == "" {
			require.NoError(t, err)
		} else {
			require.EqualError(t, err, want)
		}
	}
}

// serve runs what it prints, as up runs a file.
func TestServeRuns(t *testing.T) {
	c := upCLI(t)
	code := c.start("serve", "acme/demo", "--engine", "sim", "--dp-size", "2", "--host", "localhost")
	eventually(t, "the ranks are printed", func() bool { return strings.Contains(c.stdout(), "RANK") })
	c.interrupt()
	assert.Equal(t, 0, exit(t, code), c.stderr())
	printed := printServe(t, "acme/demo", "--engine", "sim", "--dp-size", "2")
	assert.True(t, strings.HasPrefix(c.stdout(), "# the app.yaml this stands for\n"+printed+"endpoint "+
		""), c.stdout())
	require.Len(t, c.cluster.deployed, 1)
	assert.Equal(t, printed, string(c.cluster.deployed[0].Text))
	assert.Equal(t, "localhost:8000", c.node.config.HTTPBind)
	assert.True(t, c.node.config.Ephemeral)
	assert.NoDirExists(t, c.node.config.DataDir)
}

// EN1: The engine gets the flags of the command line again, spelled in kebab case.
func TestServeFlagsReachTheEngine(t *testing.T) {
	typed := "--max-model-len 32k --trust-remote-code --no-enable-chunked-prefill " +
		"--gpu-memory-utilization 0.90 " +
		"--hf-overrides {\"a\":1e-5} --limit-mm-per-prompt {\"image\":2} --cudagraph-capture-sizes 1 2 4 " +
		"--seed -1 --new-flag x"
	text := printServe(t, append([]string{"a", "--"}, strings.Fields(typed)...)...)
	file, err := parseApps(newCLI(t).env, app.Default(), "app.yaml", []byte(text))
	require.NoError(t, err)
	flags, err := engine.Flags(file.apps[0].Engine.Args)
	require.NoError(t, err)
	assert.Equal(t, typed, strings.Join(flags, " "))
}

// EN1: no command line makes serve panic, and what it prints is canonical: it is read without a fault, as the
// same application, and is printed as the same bytes.
func FuzzServe(f *testing.F) {
	for _, words := range []string{
		"Qwen/Qwen3-8B\x00--dp-size\x004", "a\x00-tp\x002\x00-O3\x00--x.y=1\x00--\x00--new\x00[1]",
		"a\x00--engine\x00sglang\x00--tp=8\x00--dp\x008\x00--enable_dp_attention\x00--lora-paths\x00a=b",
		"a\x00--prefill\x001\x00--kv-transfer-config\x00{\"kv_connector\":\"NixlConnector\",\"x\":[1.50]}",
		"--model=ü\x00--engine=sim\x00--served-model-name\x00a\x00b\x00--env\x00A=\x01", "-\x00--=\x00---",
	} {
		f.Add(words)
	}
	f.Fuzz(func(t *testing.T, joined string) {
		words := strings.Split(joined, "\x00")
		if len(words) > 50 || strings.Contains(joined, "-h") || strings.Contains(joined, "print") {
			t.Skip() // help prints no file, and --print=false starts a node
		}
		c := newCLI(t)
		code := c.run(append([]string{"serve", "--print", "--engine=sim"}, words...))
		if c.stdout() == "" {
			assert.NotEqual(t, 0, code)
			return
		}
		parsed, _, err := app.Parse(app.Default(), "app.yaml", []byte(c.stdout()))
		require.NoError(t, err, c.stdout())
		require.Equal(t, c.stdout(), string(parsed.Print()))
	})
}
