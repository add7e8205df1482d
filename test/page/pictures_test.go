package page

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// shown is the application of the pictures.
const shown = `applications:
- name: demo
  model: {id: demo}
  engine: {kind: sim}
  routing: {policy: mex}
  data_parallel: {dp_size: 8, coupling: independent}
`

// TestPictures takes the pictures of docs/page.md after two minutes of load.
func TestPictures(t *testing.T) {
	into := os.Getenv("DPSERVE_PAGE_PICTURES")
	if into == "" {
		t.Skip("DPSERVE_PAGE_PICTURES=FOLDER takes them")
	}
	b, r := newBrowser(t), harness.Start(t, "--slots", "8", "--node-id", "gpu-1")
	r.Expect(harness.EngineFails)
	r.Deploy(shown)
	r.WaitStatus("demo", "RUNNING")
	b.look(1280, 900, "light")
	b.ofNode(r)
	load := exec.CommandContext(t.Context(), harness.Binary(t), "bench", "http://"+r.HTTP,
		"--sessions", "300", "--rate", "1.5")
	require.NoError(t, load.Start())
	defer func() {
		_ = load.Process.Kill()
		_ = load.Wait()
	}()
	time.Sleep(100 * time.Second)
	rank, known := r.Rank("demo", 0, 5)
	require.True(t, known)
	dead, err := os.FindProcess(rank.PID)
	require.NoError(t, err)
	require.NoError(t, dead.Kill())
	b.until(cellOf+` === "1"`, "0/5", "Restarts")
	b.until(cellOf+` === "ready"`, "0/5", "State")
	time.Sleep(15 * time.Second)
	b.screenshot(filepath.Join(into, "page-light.png"))
	b.look(1280, 900, "dark")
	eval[any](b, `document.querySelector("#prompt").value = "What does a rank do?"`)
	eval[any](b, `document.querySelector("#explain-form button").click()`)
	b.until(`document.querySelectorAll("#terms-table tr.picked").length === 1`)
	eval[any](b, `document.querySelector("#routing").scrollIntoView({behavior: "instant"})`)
	time.Sleep(3 * time.Second)
	b.screenshot(filepath.Join(into, "page-dark.png"))
	b.look(390, 844, "light")
	eval[any](b, `window.scrollTo({top: 0, behavior: "instant"})`)
	time.Sleep(2 * time.Second)
	b.screenshot(filepath.Join(into, "page-phone.png"))
}
