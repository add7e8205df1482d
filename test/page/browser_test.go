package page

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/coder/websocket/wsjson"
	"github.com/stretchr/testify/require"
)

// browserLimit bounds one question to the browser. No test depends on its value.
const browserLimit = time.Minute

// browser is a Chromium without a window, with one page, by its DevTools protocol.
type browser struct {
	t    *testing.T
	conn *websocket.Conn
	id   int
}

// newBrowser starts a Chromium, and skips the test where there is none.
func newBrowser(t *testing.T) *browser {
	t.Helper()
	program, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("there is no chromium here: apt install chromium")
	}
	folder, err := os.MkdirTemp("", "dpserve-page-")
	require.NoError(t, err)
	run := exec.CommandContext(t.Context(), program, "--headless=new", "--no-sandbox", "--disable-gpu",
		"--disable-dev-shm-usage", "--remote-debugging-port=0", "--user-data-dir="+folder, "about:blank")
	require.NoError(t, run.Start())
	t.Cleanup(func() {
		_ = run.Process.Kill()
		_ = run.Wait()
		_ = os.RemoveAll(folder) // its helpers may still write as they end
	})
	b := &browser{t: t}
	port := b.awaitPort(filepath.Join(folder, "DevToolsActivePort"))
	b.conn, _, err = websocket.Dial(t.Context(), b.target(port), nil)
	require.NoError(t, err)
	b.conn.SetReadLimit(64 << 20)
	t.Cleanup(func() { _ = b.conn.CloseNow() })
	return b
}

// awaitPort waits for the file in which the browser writes its port.
func (b *browser) awaitPort(file string) string {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), browserLimit)
	defer cancel()
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	for {
		text, err := os.ReadFile(file)
		if port, _, whole := strings.Cut(string(text), "\n"); err == nil && whole {
			return port
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			require.FailNow(b.t, "the browser does not start")
		}
	}
}

// target returns the address of the only page.
func (b *browser) target(port string) string {
	b.t.Helper()
	list := "http://127.0.0.1:" + port + "/json/list"
	r, err := http.NewRequestWithContext(b.t.Context(), http.MethodGet, list, nil)
	require.NoError(b.t, err)
	answer, err := http.DefaultClient.Do(r)
	require.NoError(b.t, err)
	defer func() { _ = answer.Body.Close() }()
	var pages []struct {
		Type string
		URL  string `json:"webSocketDebuggerUrl"`
	}
	require.NoError(b.t, json.NewDecoder(answer.Body).Decode(&pages))
	for _, p := range pages {
		if p.Type == "page" {
			return p.URL
		}
	}
	require.FailNow(b.t, "the browser has no page")
	return ""
}

// call makes a call of the protocol and decodes its result.
func (b *browser) call(method string, params map[string]any, result any) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), browserLimit)
	defer cancel()
	b.id++
	request := map[string]any{"id": b.id, "method": method, "params": params}
	require.NoError(b.t, wsjson.Write(ctx, b.conn, request))
	for {
		var m struct {
			ID     int
			Result json.RawMessage
			Error  *struct{ Message string }
		}
		require.NoError(b.t, wsjson.Read(ctx, b.conn, &m), method)
		if m.ID != b.id {
			continue // an event
		}
		if m.Error != nil {
			require.FailNow(b.t, method+": "+m.Error.Message)
		}
		if result != nil {
			require.NoError(b.t, json.Unmarshal(m.Result, result))
		}
		return
	}
}

// eval returns the value of an expression of JavaScript, awaited.
func eval[T any](b *browser, expression string, args ...any) (value T) {
	b.t.Helper()
	for i, a := range args {
		text, err := json.Marshal(a)
		require.NoError(b.t, err)
		args[i] = string(text)
	}
	expression = fmt.Sprintf(expression, args...)
	var r struct {
		Result struct{ Value json.RawMessage }
		Fault  *struct{ Exception struct{ Description string } } `json:"exceptionDetails"`
	}
	b.call("Runtime.evaluate", map[string]any{
		"expression": expression, "awaitPromise": true, "returnByValue": true,
	}, &r)
	if r.Fault != nil {
		require.FailNow(b.t, expression+": "+r.Fault.Exception.Description)
	}
	if r.Result.Value != nil {
		require.NoError(b.t, json.Unmarshal(r.Result.Value, &value))
	}
	return value
}

// until waits in the page until a condition of JavaScript holds.
func (b *browser) until(condition string, args ...any) {
	b.t.Helper()
	const wait = `new Promise(done => { const look = () => (%s) ? done() : setTimeout(look, 20); look(); })`
	eval[any](b, fmt.Sprintf(wait, condition), args...)
}

// open opens the page of a node with its token, as a person does.
func (b *browser) open(url, token string) {
	b.t.Helper()
	b.call("Page.navigate", map[string]any{"url": url}, nil)
	b.until(`document.querySelector("#token") && !document.querySelector("#login").hidden`)
	eval[any](b, `document.querySelector("#token").value = %s`, token)
	eval[any](b, `document.querySelector("#login-form button").click()`)
	b.until(`document.querySelector("#live").textContent === "live"`)
}

// look sets the size of the window in pixels, and the colours.
func (b *browser) look(width, height int, colours string) {
	b.t.Helper()
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{
		"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600,
	}, nil)
	b.call("Emulation.setEmulatedMedia", map[string]any{
		"features": []any{map[string]any{"name": "prefers-color-scheme", "value": colours}},
	}, nil)
}

// screenshot writes what the window shows.
func (b *browser) screenshot(file string) {
	b.t.Helper()
	var r struct{ Data string }
	b.call("Page.captureScreenshot", map[string]any{"format": "png", "optimizeForSpeed": false}, &r)
	picture, err := base64.StdEncoding.DecodeString(r.Data)
	require.NoError(b.t, err)
	require.NoError(b.t, os.WriteFile(file, picture, 0o600))
	shrink(b.t, file)
}

// shrink writes a picture with its 256 most frequent colours, of which a page has few.
func shrink(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	from, err := png.Decode(bytes.NewReader(text))
	require.NoError(t, err)
	area, counts := from.Bounds(), map[color.Color]int{}
	for y := range area.Dy() {
		for x := range area.Dx() {
			counts[from.At(x, y)]++
		}
	}
	colours := slices.SortedFunc(maps.Keys(counts),
		func(a, b color.Color) int { return counts[b] - counts[a] })
	into := image.NewPaletted(area, colours[:min(len(colours), 256)])
	draw.Draw(into, area, from, area.Min, draw.Src)
	var out bytes.Buffer
	require.NoError(t, (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, into))
	require.NoError(t, os.WriteFile(file, out.Bytes(), 0o600))
}
