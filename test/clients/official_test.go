package clients

import (
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
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

const applications = `applications:
  - name: chats
    model: {id: model-chat}
    engine: {kind: sim, args: {sim_step_ms: 0}}
    data_parallel: {dp_size: 2}
  - name: vectors
    model: {id: model-vectors}
    engine: {kind: sim, args: {sim_step_ms: 0, runner: pooling}}
    data_parallel: {dp_size: 2}
  - name: sounds
    model: {id: model-sounds}
    engine: {kind: attach, family: openai, ranks: [{url: %q}]}
`

// scriptLimit bounds a script. Python's clients take seconds to be imported.
const scriptLimit = 2 * time.Minute

// soundEngine is an engine of sounds: it hears what its uploads hold, and speaks in text. It says nothing but
// hello, so it is ready because it answers a form.
func soundEngine(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/health":
	case "/v1/models":
		_, _ = io.WriteString(w, `{"data":[{"id":"model-sounds","owned_by":"stub"}]}`)
	case "/v1/audio/transcriptions":
		file, _, err := r.FormFile("file")
		if err != nil || r.FormValue("model") != "model-sounds" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		sound, _ := io.ReadAll(file)
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]string{"text": string(sound)})
	case "/v1/audio/speech":
		if body, _ := io.ReadAll(r.Body); !strings.Contains(string(body), `"hello"`) {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "audio/wav")
		_, _ = io.WriteString(w, "RIFF hello")
	default:
		http.NotFound(w, r)
	}
}

// CC10: the official clients for Python and JavaScript run unmodified against the real binary: OpenAI's chat,
// responses, embeddings, audio and models, Anthropic's messages, streams and count_tokens, openai-agents and
// Vercel's SDK with the routes that are their defaults. Applications of embeddings, and of sounds, become
// ready by themselves.
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
	sounds := httptest.NewServer(http.HandlerFunc(soundEngine))
	t.Cleanup(sounds.Close)
	r := harness.Start(t)
	r.Deploy(fmt.Sprintf(applications, sounds.URL))
	r.WaitStatus("chats", "RUNNING")
	r.WaitStatus("vectors", "RUNNING")
	r.WaitStatus("sounds", "RUNNING")

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
				"URL=http://"+r.HTTP, "CHAT=model-chat", "VECTORS=model-vectors", "SOUNDS=model-sounds")
			out, err := run.CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Equal(t, "ok", strings.TrimSpace(string(out)))
		})
	}
	r.Quiet()
}
