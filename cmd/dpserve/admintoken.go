package main

import (
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
)

// adminTokenVariable holds the admin token itself. There is no flag for it, because the process list shows
// flags to every user.
const adminTokenVariable = "DPSERVE_ADMIN_TOKEN"

// adminLinks is the folder, below the default data dir, in which this user's nodes leave a link to the file
// of their admin token, under the address of their admin API. So the commands of this user find it, whatever
// the node's data dir is.
const adminLinks = "admin"

// adminLink is the link of a node at HOST:PORT.
func adminLink(getenv func(string) string, addr string) (string, error) {
	folder, err := defaultDataDir(getenv)
	if err != nil {
		return "", err
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", err
	}
	if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return filepath.Join(folder, adminLinks, net.JoinHostPort(host, port)), nil
}

// linkAdminToken makes the link of a node of this process. Where it cannot, for example without a home
// folder, users name the file with --admin-token-file.
func linkAdminToken(getenv func(string) string, addr, file string) (remove func()) {
	remove = func() {}
	link, err := adminLink(getenv, addr)
	if file == "" || err != nil {
		return remove
	}
	if file, err = filepath.Abs(file); err != nil || os.MkdirAll(filepath.Dir(link), 0o700) != nil {
		return remove
	}
	removeStaleLinks(filepath.Dir(link))
	_ = os.Remove(link) // of a node that had this address before
	if os.Symlink(file, link) != nil {
		return remove
	}
	return func() {
		if at, err := os.Readlink(link); err == nil && at == file {
			_ = os.Remove(link) // else the next node there does
		}
	}
}

// removeStaleLinks removes the links of nodes whose token files are gone, so that they do not collect.
func removeStaleLinks(folder string) {
	entries, _ := os.ReadDir(folder) // without any there is nothing to remove
	for _, e := range entries {
		link := filepath.Join(folder, e.Name())
		if _, err := os.Stat(link); os.IsNotExist(err) {
			_ = os.Remove(link)
		}
	}
}

// adminToken returns the token for the node at an address: of --admin-token-file, of DPSERVE_ADMIN_TOKEN, or
// of the link that a node of this user has left. "" if there is none.
func (e *env) adminToken(addr string) (string, error) {
	if e.adminTokenFile != "" {
		text, err := os.ReadFile(e.adminTokenFile)
		if err != nil {
			return "", problem.New(problem.InvalidArgument, "--admin-token-file: %w", err).
				WithHint("name a file with the token of the node; it is admin.token in the node's data dir")
		}
		return strings.TrimSpace(string(text)), nil
	}
	if token := strings.TrimSpace(e.getenv(adminTokenVariable)); token != "" {
		return token, nil
	}
	c, err := client.New(addr)
	if err != nil {
		return "", nil // newAdmin says what is wrong with the address
	}
	defer c.Close()
	at, err := url.Parse(c.Addr())
	if err != nil {
		return "", err
	}
	link, err := adminLink(e.getenv, at.Host)
	if err != nil {
		return "", nil // without a home folder there are no links
	}
	text, _ := os.ReadFile(link) // the node says that it wants a token
	return strings.TrimSpace(string(text)), nil
}
