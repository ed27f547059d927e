import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vite';

// The service serves the built files at /console/, and index.html at /. Names without hashes keep the history of the built files small:
// the service sends an ETag, so browsers notice a change.
export default defineConfig({
  base: '/console/',
  plugins: [svelte({ emitCss: true })],
  build: {
    outDir: '../static',
    emptyOutDir: true,
    target: 'es2022',
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    chunkSizeWarningLimit: 1000,
    rollupOptions: {
      output: { entryFileNames: 'console.js', chunkFileNames: '[name].js', assetFileNames: 'console[extname]' },
    },
    assetsDir: '',
  },
  test: { environment: 'node', include: ['src/**/*.test.js'] },
});
