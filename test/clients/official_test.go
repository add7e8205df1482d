package clients

import (
	"context"
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

//go:embed testdata/official.py
var pythonScript []byte

//go:embed testdata/official.mjs
var nodeScript []byte

const chatsAndVectors = `applications:
  - name: chats
    model: {id: model-chat}
    engine: {kind: sim, args: {sim_step_ms: 0}}
    data_parallel: {dp_size: 2}
  - name: vectors
    model: {id: model-vectors}
    engine: {kind: sim, args: {sim_step_ms: 0, runner: pooling}}
    data_parallel: {dp_size: 2}
`

// scriptLimit bounds a script. Python's clients take seconds to be imported.
const scriptLimit = 2 * time.Minute

// The official clients for Python and JavaScript run unmodified against the real binary: OpenAI's chat,
// responses, embeddings and models, Anthropic's messages, streams and count_tokens, openai-agents and
// Vercel's SDK with the routes that are their defaults. An application of embeddings becomes ready by itself.
func TestOfficialClients(t *testing.T) {
	t.Parallel()
	cache := os.Getenv("DPSERVE_CLIENTS_CACHE")
	if cache == "" {
		home, err := os.UserHomeDir()
		require.NoError(t, err)
		cache = filepath.Join(home, ".cache", "dpserve", "clients")
	}
	if _, err := os.Stat(filepath.Join(cache, ".complete")); err != nil {
		t.Skip("no clients in " + cache + ": test/clients/install.sh installs them")
	}
	r := harness.Start(t)
	r.Deploy(chatsAndVectors)
	r.WaitStatus("chats", "RUNNING")
	r.WaitStatus("vectors", "RUNNING")

	folder := t.TempDir()
	modules := "node_modules"
	require.NoError(t, os.Symlink(filepath.Join(cache, modules), filepath.Join(folder, modules)))
	for name, script := range map[string]struct {
		text    []byte
		program string
	}{
		"official.py":  {pythonScript, filepath.Join(cache, "venv", "bin", "python")},
		"official.mjs": {nodeScript, "node"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(folder, name)
			require.NoError(t, os.WriteFile(path, script.text, 0o600))
			ctx, cancel := context.WithTimeout(t.Context(), scriptLimit)
			defer cancel()
			run := exec.CommandContext(ctx, script.program, path)
			run.Env = append(os.Environ(),
				"URL=http://"+r.HTTP, "CHAT=model-chat", "VECTORS=model-vectors")
			out, err := run.CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Equal(t, "ok", strings.TrimSpace(string(out)))
		})
	}
	r.Quiet()
}
